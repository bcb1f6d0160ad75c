"""Networks of the papers, registered in timm."""

"""Pictures: what a mechanism sees, and what a network attends to. Drawing needs the extra `viz`; `maps` does not."""

"""Images in: sources (where they are), batches (how they reach the device), augmentation on the device."""

"""Pictures: what a mechanism sees, and what a network attends to. Needs the extra `viz`."""

"""What an operator may ask of a live scheduler, and how it is done between two steps."""

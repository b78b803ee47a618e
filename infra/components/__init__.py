"""One ComponentResource a file."""

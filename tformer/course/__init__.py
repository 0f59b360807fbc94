"""What only the lessons need."""

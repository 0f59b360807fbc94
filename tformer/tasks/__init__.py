"""What models are trained for here: translation, and predicting masked words."""

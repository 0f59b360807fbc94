"""What models are trained for: translation, masked language modelling."""

"""Training a language model from a recipe: the one place that knows data, model, method and Trainer together."""

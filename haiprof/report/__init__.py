"""What was found, shown: terminal views, the verdict card, web pages, TensorBoard scalars."""

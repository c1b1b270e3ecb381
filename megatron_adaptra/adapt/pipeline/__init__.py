"""The remedy of one pipeline: order and depth of its ops."""

"""What a rank does in an iteration: ops, messages, collectives, and the watch over them."""

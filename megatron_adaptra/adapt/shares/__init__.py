"""The remedy of slow replicas: how many microbatches each of them runs."""

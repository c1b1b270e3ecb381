"""The remedy of several replicas: who runs a microbatch at a stage."""

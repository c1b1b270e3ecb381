"""`--adaptra-sync share` and `auto`: counts of microbatches, found and voted on."""

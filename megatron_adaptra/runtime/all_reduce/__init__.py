"""`--adaptra-allreduce auto`: which all-reduce a data-parallel group runs, found and voted on."""

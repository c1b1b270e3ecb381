"""What commands show of several replicas in one plan."""

"""The search of the adaptive policy, and how long any search may take."""

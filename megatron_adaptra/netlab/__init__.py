"""Several hosts on one machine, with slow links between them: namespaces joined by a relay."""

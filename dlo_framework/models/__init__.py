"""What plug-ins and tasks share about models: attention, experts, sizes, recomputation."""

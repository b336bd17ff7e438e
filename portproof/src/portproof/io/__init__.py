"""What the kit reads, writes and shows in its own way, beside `sturdyio`: extras, records, checkpoints, passes."""

"""What the kit reads, writes and shows beside `sturdyio`: extras, records, checkpoints, passes."""

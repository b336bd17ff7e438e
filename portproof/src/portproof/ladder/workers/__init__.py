"""What runs in processes of its own: what starts them, and what each of them executes."""

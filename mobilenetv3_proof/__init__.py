"""What the steps share: this project's pair, its weights, and its training runs as processes of their own."""

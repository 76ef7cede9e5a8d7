"""From one champion to the next: labels, fine-tuning on them, promotion, and the store of champions."""

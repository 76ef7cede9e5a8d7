"""What production decided and what people later said of it."""

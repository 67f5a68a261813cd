"""Text to grades. A worker imports this package, so it stays light: no torch, no numpy here."""

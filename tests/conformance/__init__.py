"""What the CPU library computes, against NumPy, and how it behaves, with real processes."""

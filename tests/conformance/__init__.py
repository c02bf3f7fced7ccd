"""What the CPU library computes and how it behaves, against NumPy and with real processes; on a GPU the same matrix."""

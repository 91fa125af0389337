"""Measure the speed of models on this machine, and compare it with the limits of the hardware."""

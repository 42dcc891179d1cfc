"""What a run will need, by formula: memory, arithmetic, time; pure."""

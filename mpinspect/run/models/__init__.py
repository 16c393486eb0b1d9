"""Finding the models that a script trains, and inspecting them. Knows torch; loaded once the script has imported it."""

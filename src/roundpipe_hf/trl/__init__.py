"""TRL's trainers over the engine. Imports every other room."""

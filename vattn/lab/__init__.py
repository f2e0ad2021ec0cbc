"""What measures, predicts and explains the engine: nothing in the engine imports it."""

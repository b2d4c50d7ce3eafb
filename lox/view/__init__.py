"""Looking at runs: curves over lanes, statistics over seeds, plots, and a dashboard in the browser."""

"""Looking at runs: curves over lanes, statistics over seeds, plots, and a dashboard in the browser."""

from lox.view._compare import Comparison as Comparison
from lox.view._compare import compare as compare
from lox.view._plot import Plot as Plot
from lox.view._plot import plot as plot

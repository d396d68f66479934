"""What kvdefrag did and how it stands, told to logs and to Prometheus."""

from kvdefrag.metrics.log import LogSink
from kvdefrag.metrics.prometheus import PrometheusSink
from kvdefrag.metrics.tally import Figures, Sink, Tally

__all__ = ["Figures", "LogSink", "PrometheusSink", "Sink", "Tally"]

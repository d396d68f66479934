"""Observers of step reports, one file a backend."""

from kvdefrag.metrics.log import LogObserver
from kvdefrag.metrics.observer import FanOut, Observer
from kvdefrag.metrics.prometheus import PrometheusObserver

__all__ = ["FanOut", "LogObserver", "Observer", "PrometheusObserver"]

"""Measurements that anybody can repeat: `python -m minipaged.bench` lists them."""

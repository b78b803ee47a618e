"""The processes of `scripts/bench_fanout.py`: producer, clients, and the naive streamer."""

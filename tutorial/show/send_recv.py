"""Prints and draws chapter 3's first messages, and the sum through rank 0."""

from tutorial import pictures


def show(results, path):
    """Shows for each rank `(message and ms, sum, MB sent, ms of the sum)`."""
    (sent, _), (received, waited) = results[0][0], results[1][0]
    print(f"rank 0 sends {sent}")
    print(f"rank 1 receives {received} after {waited:.0f} ms")
    print("the sum of a million numbers of each rank, through rank 0")
    for rank, (_, total, megabytes, ms) in enumerate(results):
        print(f"rank {rank} has {total:.0f}, sent {megabytes:4.1f} MB, ready after {ms:5.1f} ms")
    bars = {f"rank {rank}": {"": megabytes} for rank, (_, _, megabytes, _) in enumerate(results)}
    pictures.bars(path, {("sent in an all-reduce through rank 0", "MB"): bars})

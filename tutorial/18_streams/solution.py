"""Solutions of chapter 18."""


def end_of_overlap(backward, send):
    """Returns when the last sum of a step is complete, if each is launched in its hook."""
    computed = sent = 0.0
    for computing, sending in zip(backward, send, strict=True):
        computed += computing
        sent = max(sent, computed) + sending
    return sent


def races(operations):
    """Returns the names of the tensors that one stream touches before the other is done."""
    count = {"compute": 0, "nccl": 0}  # operations of each stream
    seen = {"compute": 0, "nccl": 0}  # how many of the other stream's it comes after
    events, last, found = {}, {}, []
    for kind, stream, name in operations:
        other = "nccl" if stream == "compute" else "compute"
        if kind == "record":
            events[name] = count[stream]
        elif kind == "wait":
            seen[stream] = max(seen[stream], events[name])
        else:
            count[stream] += 1
            last[stream, name] = count[stream]
            if last.get((other, name), 0) > seen[stream] and name not in found:
                found.append(name)
    return found

"""Prints and draws chapter 6: a step of the naive loop, and one with overlap."""

from tutorial import pictures


def show(result, nproc, path):
    """Shows `((spans, parameters) of both ways, the sum in the wrong order)`."""
    (naive, parameters), (overlap, others), wrong = result
    panels, exposed = {}, []
    for name, spans in {"naive": naive, "overlap": overlap}.items():
        (_, forward, backward), (_, _, end) = spans[1:3]
        exposed.append(end - backward)
        ms = f"backward {backward - forward:5.1f} ms, then waits {end - backward:5.1f} ms"
        print(f"{name:<8} {ms}, together {end - forward:5.1f} ms")
        rows = {"rank 0": [span for span in spans if span[0] != "in flight"]}
        if spans[3:]:
            rows["its gradients"] = spans[3:]
        panels[name] = rows
    print(f"exposed with overlap: {100 * exposed[1] / exposed[0]:.0f} % of what naive waits")
    print(f"the same parameters, to the last bit: {parameters.equal(others)}")
    print(f"with orders that differ, 1 on each of {nproc} ranks sums up to {wrong:.0f}")
    pictures.timelines(path, panels)

"""Solutions of chapter 16."""


def longest(costs, owners):
    """Returns the sum of the costs of the matrices of the rank that has the most to compute."""
    loads = dict.fromkeys(owners, 0)
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return max(loads.values())


def owners(costs, nproc):
    """Returns each matrix's owner: a list of ranks, in the order of the matrices."""
    loads, found = [0] * nproc, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        rank = loads.index(min(loads))
        loads[rank] += costs[number]
        found[number] = rank
    return found

"""The memory that gradients are packed into, and the plan of what lies where."""

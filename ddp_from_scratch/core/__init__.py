"""The part that every gradient goes through: ready, pack, launch, wait, unpack."""

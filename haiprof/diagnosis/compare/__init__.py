"""Two runs compared: slower or not, by how much, by what, and what differs around them."""

"""The appliance image: what it is made of, and what its launch must measure."""

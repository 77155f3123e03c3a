"""The image's first process: prepares the machine, starts the appliance as a user without rights, ends the machine.

Standard library alone, so that it starts quickly; nothing of the appliance is imported. It sees no prompt and no
answer.
"""

"""Boot the image in an emulated machine with a TPM in software, and try what a hostile host would.

Success and failure are read from the machine's console and from the client's verdict; an emulator's exit status says
nothing. Nothing here needs KVM or leaves this machine.
"""

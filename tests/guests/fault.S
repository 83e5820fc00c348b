# Faults with an empty interrupt table: the processor shuts down.
.include "guest.inc"

.globl start
start:
    lidt nothing
    ud2

.data
nothing: .word 0
    .long 0

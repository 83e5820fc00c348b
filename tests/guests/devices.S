# The entry of devices.c, which follows as 32-bit assembly.
.include "guest.inc"

.globl start
start:
    movl $stack_top, %esp
    call run

.bss
.balign 16
.skip 4096
stack_top:

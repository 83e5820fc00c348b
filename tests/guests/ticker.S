# Counts, and tells when it finds itself restored. The nonce is drawn at boot and lives in memory
# only, and so do the ticks: a guest that was rebooted instead of restored has another nonce and
# few ticks.
#
#   boot:      serial "up <nonce>\n", doorbell READY, doorbell NONCE
#   restored:  (the generation id changed) doorbell RESTORED, NONCE, TICKS, serial "restored ..."
#   always:    doorbell BEAT every 2^28 TSC cycles (about 0.1 s)
.include "guest.inc"

.globl start
start:
    movl $stack_top, %esp
    rdtsc
    orl $NUMBER_NONCE, %eax
    movl %eax, nonce
    movl $up, %esi
    call print
    movl nonce, %ebx
    call print_hex
    movl $newline, %esi
    call print
    call note_generation
    ring $READY
    ring nonce

loop:
    incl ticks
    movl GENERATION_ID, %eax
    cmpl generation, %eax
    jne restored
    rdtsc
    shrdl $28, %edx, %eax
    cmpl beat, %eax
    je loop
    movl %eax, beat
    andl $(NUMBER_BEAT - 1), %eax
    orl $NUMBER_BEAT, %eax
    movw $DOORBELL, %dx
    outl %eax, %dx
    jmp loop

restored:
    ring $RESTORED
    call note_generation
    ring nonce
    movl ticks, %eax
    andl $(NUMBER_TICKS - 1), %eax
    orl $NUMBER_TICKS, %eax
    movw $DOORBELL, %dx
    outl %eax, %dx
    movl $again, %esi
    call print
    movl nonce, %ebx
    call print_hex
    movl $newline, %esi
    call print
    jmp loop

note_generation:
    movl GENERATION_ID, %eax
    movl %eax, generation
    ret

.data
up: .asciz "up "
again: .asciz "restored "
newline: .asciz "\n"
.balign 4
nonce: .long 0
ticks: .long 0
generation: .long 0
beat: .long 0

.bss
.skip 1024
stack_top:

/*
 * Drives block, entropy and socket devices by polling, is frozen, and drives them again.
 *
 *   boot:      read sector 0 (printed), write the nonce to sector 1 and read it back, four random
 *              bytes, connect to host port 1234 and get "hello" echoed; doorbell READY, NONCE
 *   restored:  sector 1 still holds the nonce, write sector 2, doorbell RESTORED, NONCE, four
 *              other random bytes (RANDOM), the old connection was reset (event), connect again
 *              and get "again" echoed; doorbell DONE
 *
 * Anything unexpected rings FAILED with the line number. Compiled to 32-bit assembly and assembled
 * as part of a 64-bit image, like the other guests; no libc, no interrupts.
 */
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

enum { READY = 1, RESTORED = 0x1001, DONE = 0x1002, FAILED = 0x00f00000 };
enum { NONCE = 0x80000000, RANDOM = 0x40000000 };
enum { DOORBELL = 0x5042, SERIAL = 0x3f8, GENERATION_ID = 0xfe000 };
enum { WINDOWS = 0xd0000000u, WINDOW = 0x1000 };
enum { SIZE = 8 }; /* entries of every queue */

static void ring(u32 value) {
    __asm__ volatile("outl %0, %%dx" ::"a"(value), "d"((u16)DOORBELL) : "memory");
}

static void __attribute__((noreturn)) fail(u32 line) {
    ring(FAILED | line);
    for (;;) {
    }
}

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) fail(__LINE__);                                                          \
    } while (0)

static void print(const u8 *text, u32 length) {
    while (length--) __asm__ volatile("outb %0, %%dx" ::"a"(*text++), "d"((u16)SERIAL));
}

static u32 clock(void) {
    u32 low, high;
    __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
    return low;
}

struct descriptor {
    u64 address;
    u32 length;
    u16 flags, next;
} __attribute__((packed));

struct queue {
    struct descriptor descriptors[SIZE];
    struct {
        volatile u16 flags, index, ring[SIZE];
    } available;
    u8 pad[4];
    struct {
        volatile u16 flags, index;
        volatile struct {
            u32 id, length;
        } ring[SIZE];
    } used;
    u32 window, number;
    u16 seen;
} __attribute__((aligned(64)));

static volatile u32 *reg(u32 window, u32 offset) {
    return (volatile u32 *)(window + offset);
}

/* Resets the device and agrees on VIRTIO_F_VERSION_1 alone. */
static void begin(u32 window) {
    *reg(window, 0x70) = 0;
    *reg(window, 0x70) = 1;
    *reg(window, 0x70) = 3;
    *reg(window, 0x24) = 0;
    *reg(window, 0x20) = 0;
    *reg(window, 0x24) = 1;
    *reg(window, 0x20) = 1;
    *reg(window, 0x70) = 11;
    CHECK(*reg(window, 0x70) == 11);
}

static void set_up(struct queue *q, u32 window, u32 number) {
    q->window = window;
    q->number = number;
    *reg(window, 0x30) = number;
    CHECK(*reg(window, 0x34) >= SIZE);
    *reg(window, 0x38) = SIZE;
    *reg(window, 0x80) = (u32)q->descriptors;
    *reg(window, 0x84) = 0;
    *reg(window, 0x90) = (u32)&q->available;
    *reg(window, 0x94) = 0;
    *reg(window, 0xa0) = (u32)&q->used;
    *reg(window, 0xa4) = 0;
    *reg(window, 0x44) = 1;
}

static void describe(struct queue *q, u32 at, void *address, u32 length, u32 flags, u32 next) {
    q->descriptors[at].address = (u32)address;
    q->descriptors[at].length = length;
    q->descriptors[at].flags = flags;
    q->descriptors[at].next = next;
}

static void offer(struct queue *q, u32 head) {
    q->available.ring[q->available.index % SIZE] = head;
    __asm__ volatile("" ::: "memory");
    q->available.index++;
    __asm__ volatile("" ::: "memory");
    *reg(q->window, 0x50) = q->number;
}

/* Waits for the next used buffer and returns its head; its length goes to *length. */
static u32 take(struct queue *q, u32 *length) {
    for (u32 turn = 0; q->used.index == q->seen; turn++) CHECK(turn < 400000);
    u32 at = q->seen++ % SIZE;
    if (length) *length = q->used.ring[at].length;
    return q->used.ring[at].id;
}

static struct queue disk, random_numbers, rx, tx, events;
static u32 socket_window;
static u8 sector[512];
static struct {
    u32 type, reserved;
    u64 sector;
} request;
static u8 status;

static void transfer(u32 write, u32 number) {
    request.type = write;
    request.sector = number;
    status = 0xff;
    describe(&disk, 0, &request, 16, 1, 1);
    describe(&disk, 1, sector, 512, write ? 1 : 3, 2);
    describe(&disk, 2, &status, 1, 2, 0);
    offer(&disk, 0);
    CHECK(take(&disk, 0) == 0);
    CHECK(status == 0);
}

static u32 draw(void) {
    static u32 value;
    value = 0;
    describe(&random_numbers, 0, &value, 4, 2, 0);
    offer(&random_numbers, 0);
    u32 length;
    CHECK(take(&random_numbers, &length) == 0 && length == 4);
    return value;
}

struct packet {
    u64 source_cid, target_cid;
    u32 source_port, target_port, length;
    u16 type, op;
    u32 flags, buffer, forwarded;
    u8 data[64];
} __attribute__((packed));

enum { HEADER = 44, HOST = 2, HOST_PORT = 1234 };
enum { REQUEST = 1, RESPONSE = 2, RST = 3, RW = 5, CREDIT_UPDATE = 6, CREDIT_REQUEST = 7 };

static struct packet received[4], sent;
static u32 event;

static void give_packet(u32 at) {
    describe(&rx, at, &received[at], sizeof(struct packet), 2, 0);
    offer(&rx, at);
}

static void send(u32 port, u32 op, const char *data) {
    u32 length = 0;
    for (; data && data[length]; length++) sent.data[length] = data[length];
    sent.source_cid = *reg(socket_window, 0x100);
    sent.target_cid = HOST;
    sent.source_port = port;
    sent.target_port = HOST_PORT;
    sent.length = length;
    sent.type = 1;
    sent.op = op;
    sent.flags = 0;
    sent.buffer = 65536;
    sent.forwarded = 0;
    describe(&tx, 0, &sent, HEADER + length, 0, 0);
    offer(&tx, 0);
    CHECK(take(&tx, 0) == 0);
}

/* Waits for a packet with this operation for the port; others than credit are unexpected. */
static struct packet *expect(u32 port, u32 op) {
    for (;;) {
        u32 at = take(&rx, 0);
        struct packet *packet = &received[at];
        if (packet->op == op && packet->target_port == port) return packet;
        CHECK(packet->op == CREDIT_UPDATE || packet->op == CREDIT_REQUEST || packet->op == RST);
        give_packet(at);
    }
}

static void converse(u32 port, const char *word) {
    send(port, REQUEST, 0);
    struct packet *packet = expect(port, RESPONSE);
    give_packet(packet - received);
    send(port, RW, word);
    packet = expect(port, RW);
    u32 length = 0;
    for (; word[length]; length++) CHECK(packet->data[length] == word[length]);
    CHECK(packet->length == length);
    give_packet(packet - received);
}

void run(void) {
    volatile u32 *generation = (volatile u32 *)GENERATION_ID;
    u32 nonce = clock() | NONCE, before = *generation;
    for (u32 window = WINDOWS; *reg(window, 0) == 0x74726976; window += WINDOW) {
        u32 type = *reg(window, 8);
        begin(window);
        if (type == 2) {
            set_up(&disk, window, 0);
        } else if (type == 4) {
            set_up(&random_numbers, window, 0);
        } else if (type == 19) {
            socket_window = window;
            set_up(&rx, window, 0);
            set_up(&tx, window, 1);
            set_up(&events, window, 2);
        } else {
            fail(__LINE__);
        }
        *reg(window, 0x70) = 15;
        CHECK(*reg(window, 0x70) == 15);
    }
    CHECK(disk.window && random_numbers.window && socket_window);

    transfer(0, 0);
    print(sector, 16);
    for (u32 i = 0; i < 512; i += 4) *(u32 *)(sector + i) = nonce;
    transfer(1, 1);
    *(u32 *)sector = 0;
    transfer(0, 1);
    CHECK(*(u32 *)sector == nonce && *(u32 *)(sector + 508) == nonce);
    draw();
    describe(&events, 0, &event, 4, 2, 0);
    offer(&events, 0);
    for (u32 at = 0; at < 4; at++) give_packet(at);
    converse(77, "hello");
    ring(READY);
    ring(nonce);

    for (u32 round = 0;; round++) {
        while (*generation == before) {
        }
        before = *generation;
        ring(RESTORED);
        ring(nonce);
        transfer(0, 1);
        CHECK(*(u32 *)sector == nonce && *(u32 *)(sector + 508) == nonce);
        for (u32 i = 0; i < 512; i += 4) *(u32 *)(sector + i) = round;
        transfer(1, 2);
        *(u32 *)sector = 0xffffffff;
        transfer(0, 2);
        CHECK(*(u32 *)sector == round);
        ring(RANDOM | (draw() & 0x3fffffff));
        /* VIRTIO_VSOCK_EVENT_TRANSPORT_RESET: the connections are gone. */
        CHECK(take(&events, 0) == 0 && event == 0);
        offer(&events, 0);
        converse(78 + round, "again");
        ring(DONE);
    }
}

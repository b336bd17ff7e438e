"""Where one machine of several stands in the network: `python -m mobilenetv3_common.network HOST PORT`.

Prints "MASTER OWN INTERFACE": the IPv4 address of HOST, this machine's own address on the way there, and the name of
the interface that has it. A machine's name is no help, since it often stands for 127.0.0.1 on the machine itself.
"""

import fcntl
import socket
import struct
import sys

SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface


def own_address(host: str, port: int) -> tuple[str, str, str]:
    """(address of `host`, own address on the way there, interface that has it); OSError where there is no way."""
    master = socket.gethostbyname(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((master, port))  # sends nothing
        own = way.getsockname()[0]
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(way.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == own:
                return master, own, name
    raise OSError(f"no interface has the address {own}")


if __name__ == "__main__":
    print(*own_address(sys.argv[1], int(sys.argv[2])))

"""How does the text of a kernel become machine code, and where is that kept?"""
